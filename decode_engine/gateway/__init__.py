"""OpenAI's API over HTTP, in front of the gRPC service."""
