"""The small functions of a model's layers as one kernel each, where that gives what the model's own modules give."""
