"""GGUF files: converted to model folders, in which every setting and every tensor of the file was used."""
