"""The model reads the document: chunk by chunk, with an attention that records."""
