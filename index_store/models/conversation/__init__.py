"""Conversations: messages and tools, and how a model's own chat template and tokenizer make tokens of them"""
