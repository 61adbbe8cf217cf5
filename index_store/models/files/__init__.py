"""Files: a model's folder on this machine, its weights and their digests, and what the user's cache keeps."""
