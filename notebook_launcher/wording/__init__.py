"""The wording of what people read: texts, numbers and values."""
