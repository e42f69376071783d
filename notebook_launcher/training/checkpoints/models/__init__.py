"""A model's weights in files, as Hugging Face's libraries name and read them."""
