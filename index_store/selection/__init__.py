"""From scores to kept keys: rankings, budgets, remainders, and the loops on the host behind them."""
