"""The subcommands of `transom`: one module per command, and the modules that they share."""
