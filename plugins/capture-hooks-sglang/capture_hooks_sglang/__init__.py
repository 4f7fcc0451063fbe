"""SGLang's models, for capture-hooks.  Imports without SGLang."""
