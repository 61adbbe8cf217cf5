"""Searches on the host beside a device: mailboxes, worker threads, and how captured steps use them."""
