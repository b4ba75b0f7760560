"""A stand-in for NLTK's sentence data, for tests only: the files' format without what was learned."""

from pathlib import Path


def write_punkt_tab(folder: Path) -> Path:
    """English without abbreviations or collocations: every full stop ends a sentence."""
    english = folder / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (english / name).write_text("")
    return folder
