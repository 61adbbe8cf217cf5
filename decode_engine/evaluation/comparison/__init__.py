"""Methods compared with full attention: the run, means and errors, files, tables and pictures."""
