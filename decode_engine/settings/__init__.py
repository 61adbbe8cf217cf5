"""What commands and requests may say: the server's configuration, options of several commands, bounds of requests."""
