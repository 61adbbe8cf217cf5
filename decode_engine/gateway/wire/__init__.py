"""OpenAI's words: the parameters of its endpoints, and the shapes of its replies."""
