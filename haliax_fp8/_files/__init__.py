"""Files as others write them: safetensors and JSON, read strictly."""
