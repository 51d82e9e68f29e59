"""SGLang: the plugin's entry point. Nothing heavy is imported here, because SGLang calls it in every process."""
