"""What a type checker knows of the interface. `make lint` checks it; the last line has to be an error."""

import stepsaver

model = stepsaver.load()
one: str = model.generate("a", rules="trim")
many: list[str] = model.generate(["a", "b"])
answer: stepsaver.Answer = model.generate("a", details=True)
answers: list[stepsaver.Answer] = model.generate([[1, 2]], details=True)
flag: bool = bool(input())
either = model.generate("a", details=flag, ids=flag)
pieces = [piece.text for piece in model.stream("a", ids=flag)]
model.generate("a", max_new_tokens="8")  # type: ignore[call-overload]
