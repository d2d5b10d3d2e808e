"""Doctor: ordered checks of an engine, a configuration, a server or a log; each finding brings its evidence."""
