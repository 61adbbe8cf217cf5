"""OpenAI's API over HTTP, beside the gRPC services, by the same answers."""
