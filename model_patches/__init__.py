"""One file per architecture, named after its `config.model_type`, with a `PLAN`."""
