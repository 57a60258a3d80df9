"""Small helpers that know nothing of caching: text, logs, options, forks, imports."""
