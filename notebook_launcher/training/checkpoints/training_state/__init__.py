"""`save_state` and `load_state`: everything that training needs to continue."""
