"""Who is served when: loading, waiting, limits, and how calls begin and end."""
