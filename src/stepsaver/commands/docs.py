"""`stepsaver docs`: the figures in Markdown from the committed artifacts, and the reference of commands."""

import argparse

WHEN_STOPPED = "no file is half written; the same command starts again"
HELP = "write the figures in this repository's Markdown from artifacts, and the reference of commands; wrap lines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page would change")


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.durable import write_beside
    from stepsaver.bench.folders import experiments_folder
    from stepsaver.commands._reference import BEGIN, END, command_reference
    from stepsaver.report.markdown.markers import put_between
    from stepsaver.report.markdown.pages import markdown_pages, renewed
    from stepsaver.report.markdown.wrapping import wrap

    root = experiments_folder().parent
    changed = False
    for path in markdown_pages(root):
        text = renewed(path, root)
        if BEGIN in text:
            text = put_between(text, BEGIN, END, wrap(command_reference())) or text
        if text == path.read_text(encoding="utf-8"):
            continue
        changed = True
        if not options.check:
            write_beside(path, text)
        print(f"{path.relative_to(root)}{' would change' * options.check}")
    return int(changed and options.check)
