"""Rules that daemons and drivers share about their hosts: key files, safe paths, exit codes, and
text for terminals and logs."""
