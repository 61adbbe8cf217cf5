"""Between logits and the choice of a token: penalties, biases, grammars, and log probabilities"""
