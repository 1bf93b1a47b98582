"""What several commands take: the config with its overrides, volumes, the options of sampling."""
