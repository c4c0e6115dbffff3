"""JSON-Schema-Test-Suite under `strict: true`: which schemas are taken, and whether only valid values come of them.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    pip install jsonschema-rs
    python -m benchmarks.schema_suite JSON-Schema-Test-Suite [--outputs N]

Each schema is compiled as the server's helper process does, for the demo model's vocabulary. Of one that is taken,
random outputs are drawn by the masks, and those that end are validated by jsonschema-rs; and each of the suite's own
values is asked: one that is invalid must not have the form, one that is valid should (properties in another order than
the schema's do not have it). Formats say nothing. A minute on two cores; exit code 1 where something invalid comes.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np

from benchmarks.conditions import conditions, save
from moe_serve.attention_dp.constraint import Constraint
from moe_serve.config import load_config, model_dir
from moe_serve.errors import RequestError
from moe_serve.models.tokenizer import Tokenizer
from moe_serve.structured.grammar import Matcher
from moe_serve.structured.vocabulary import Vocabulary

_EOS, _VOCABULARY = 1, 2050  # of the demo model
_MOST_TOKENS = 120
_DRAFTS = {
    "draft4": ("http://json-schema.org/draft-04/schema#", jsonschema_rs.Draft4Validator),
    "draft6": ("http://json-schema.org/draft-06/schema#", jsonschema_rs.Draft6Validator),
    "draft7": ("http://json-schema.org/draft-07/schema#", jsonschema_rs.Draft7Validator),
    "draft2019-09": ("https://json-schema.org/draft/2019-09/schema", jsonschema_rs.Draft201909Validator),
    "draft2020-12": ("https://json-schema.org/draft/2020-12/schema", jsonschema_rs.Draft202012Validator),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of the suite")
    parser.add_argument("--outputs", type=int, default=4, help="drawn for each schema")
    args = parser.parse_args()
    facts, rows = conditions("moe-serve", "llguidance", "jsonschema-rs"), []
    tokens = Tokenizer.from_folder(model_dir(load_config().model)).token_bytes(_VOCABULARY)
    vocabulary = Vocabulary(tokens, [_EOS])
    wrong: list[str] = []
    refused = Counter[str]()
    for draft, (dialect, validator) in _DRAFTS.items():
        counts = dict.fromkeys(("schemas", "taken", "outputs", "of them invalid", "cut"), 0)
        counts |= dict.fromkeys(("valid values", "of them taken", "invalid values", "of those taken"), 0)
        for place, schema, tests in groups(args.folder / "tests" / draft, dialect):
            counts["schemas"] += 1
            form = Constraint("json_schema", json.dumps(schema), path="schema")
            try:
                compiled = Matcher.compiled(form, vocabulary, tries=True)
            except RequestError as error:
                refused[reason(str(error))] += 1
                continue
            counts["taken"] += 1
            check = validator(schema, validate_formats=False)
            for seed in range(args.outputs):
                text = drawn(compiled.copy(), vocabulary, seed)
                counts["cut" if text is None else "outputs"] += 1
                if text is not None and not check.is_valid(json.loads(text)):
                    counts["of them invalid"] += 1
                    wrong.append(f"{place}: drew {text}")
            for test in tests:
                is_taken = takes(compiled.copy(), vocabulary, json.dumps(test["data"], ensure_ascii=False))
                counts["valid values" if test["valid"] else "invalid values"] += 1
                counts["of them taken" if test["valid"] else "of those taken"] += is_taken
                if is_taken and not test["valid"]:
                    wrong.append(f"{place}: takes {json.dumps(test['data'])} ({test['description']})")
        rows.append({"draft": draft, **counts})
        print(rows[-1], flush=True)
    reasons = "\n".join(f"- {number} × {words}" for words, number in refused.most_common())
    found = "\n".join(f"- {each}" for each in wrong) or "None."
    notes = f"Why schemas are refused:\n\n{reasons}\n\nWhat is invalid and has the form:\n\n{found}"
    print(save("schema_suite", "JSON-Schema-Test-Suite under strict", rows, facts, notes))
    sys.exit(bool(wrong))


def groups(folder: Path, dialect: str) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Yields place, schema and tests of each group of a draft; a schema that names no draft gets it."""
    for path in sorted(folder.glob("*.json")):
        if path.stem == "format":
            continue
        for group in json.loads(path.read_text()):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": dialect, **schema}
            yield f"{folder.name}/{path.stem}: {group['description']}", schema, group["tests"]


def reason(message: str) -> str:
    """Returns why a schema is refused, without what differs from schema to schema."""
    said = message.removeprefix("schema cannot be served: ").partition("; ")[0].partition(" while processing")[0]
    return re.sub(r"/[^ ]*/|'[^']*'|[a-z]+://\S+", "…", said)


def drawn(matcher: Matcher, vocabulary: Vocabulary, seed: int) -> str | None:
    """Returns an output drawn from the masks; None where it does not end soon."""
    draw, output = random.Random(seed), b""
    for _ in range(_MOST_TOKENS):
        bits = np.unpackbits(matcher.mask().view(np.uint8), count=vocabulary.size, bitorder="little")
        ids = np.flatnonzero(bits).tolist()
        if _EOS in ids and (len(ids) == 1 or draw.random() < 0.4):
            return output.decode()
        closing = [each for each in ids if (vocabulary.tokens[each] or b"").strip() in (b'"', b"}", b"]", b",")]
        some = closing if closing and draw.random() < 0.4 else [each for each in ids if each != _EOS]
        output += vocabulary.tokens[(token := draw.choice(some))] or b""
        matcher.advance([token])
    return None


def takes(matcher: Matcher, vocabulary: Vocabulary, text: str) -> bool:
    """Returns whether a text has a form."""
    try:
        matcher.advance(vocabulary.tokenizer.tokenize_str(text))
    except RequestError:
        return False
    return matcher.may_end


if __name__ == "__main__":
    main()
