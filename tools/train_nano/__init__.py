"""Training of the small checkpoint that ships with the project: data, tokenizer, training graph, export, drafter."""
