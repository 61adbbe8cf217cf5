"""Quality of methods on a model: tasks, measures, comparisons with full attention, tuning."""
