"""sash's server under load: generators, a null server beside the offline engine, other servers, a report."""
