"""Long-context tasks made from any text for any tokenizer: documents with facts in them, and questions about them."""
