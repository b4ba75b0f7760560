"""The problems of the embedded tasks: their seeded makers, the test files made from them, and the tokenizer."""
