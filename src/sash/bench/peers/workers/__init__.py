"""What runs in the peers' own environments: stand-alone scripts."""
