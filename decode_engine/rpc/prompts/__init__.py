"""What a request says to a model: messages, tools, and what is to become of them."""
