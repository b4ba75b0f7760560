"""Checks for what IFEval's checkers need before anything is generated. They themselves would fail after it."""

from stepsaver.engine.errors import UsageError

LANGUAGE_SEED = 0


def require_ifeval() -> None:
    """Checks for NLTK's sentence data, and fixes the seed of language detection, which is else random."""
    try:
        import langdetect
        import nltk
    except ModuleNotFoundError as error:
        raise UsageError(f"ifeval needs {error.name}: pip install 'lm_eval[ifeval]'") from None
    langdetect.DetectorFactory.seed = LANGUAGE_SEED
    try:
        nltk.data.find("tokenizers/punkt_tab/english")
    except LookupError:
        raise UsageError(
            "ifeval needs NLTK's punkt_tab: run `python -m nltk.downloader punkt_tab`, or unpack it into "
            "tokenizers/ of a folder named by NLTK_DATA"
        ) from None
