"""The command `index-store`, and what all commands share: consoles, formats, entry points."""
