"""The door: who may call a server, by tokens in a file, and the certificates that it shows."""
