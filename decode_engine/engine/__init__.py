"""The engine: who waits, who reads a prompt, who decodes, and which token comes next."""
