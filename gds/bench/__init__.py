"""How fast a directory is, measured through the backends that everything else uses."""
