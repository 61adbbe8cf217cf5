"""Searches on the host beside a device: mailboxes, worker threads and the compiled loops that they run."""
