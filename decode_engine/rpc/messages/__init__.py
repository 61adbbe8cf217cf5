"""Messages read and made: what a request says, checked, and what is said of contexts, methods and answers."""
