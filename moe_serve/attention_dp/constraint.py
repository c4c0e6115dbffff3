"""The form that the output of a request must have, from its first token or behind its reasoning."""

from dataclasses import dataclass, field

from moe_serve.errors import RequestError

KINDS = ("json_schema", "regex", "choice", "grammar", "structural_tag")
MAX_CHARS = 1 << 19  # of a constraint's text


@dataclass(frozen=True)
class FormStart:
    """The place in an output where its form begins: behind the model's reasoning.

    after:   token ids of the sequences that end the reasoning, each somewhere behind the one before it; the form begins
             behind the last one
    opens:   the token that opens a reasoning. An output that begins with another token has no reasoning: its form
             begins with the output. None: every output begins with reasoning
    may_end: the output may end before its form has begun, by a call of a tool
    """

    after: tuple[tuple[int, ...], ...]
    opens: int | None = None
    may_end: bool = False

    def validate(self) -> None:
        """Raises RequestError where the fields are not sequences of token ids."""
        is_nested = isinstance(self.after, tuple) and all(isinstance(each, tuple) for each in self.after)
        ids: list[object] = [token for each in self.after for token in each] if is_nested else [None]
        ids += [] if self.opens is None else [self.opens]
        if any(type(token) is not int for token in ids):
            raise RequestError(
                f"constraint.start is {self!r:.100}, expected tuples of token ids, as in ((5,), (7, 8))", "constraint"
            )


@dataclass(frozen=True)
class Constraint:
    """The output is a text of this form, from its first token, or from where `start` says, to its last.

    kind: how `text` is meant:
          json_schema     a JSON schema, as JSON
          regex           a regular expression, which the whole output matches (Rust's syntax, without look-around)
          choice          a JSON list of strings, one of which is the output
          grammar         a context-free grammar: EBNF as of llama.cpp (`root ::= ...`), or Lark (`start: ...`)
          structural_tag  free text in which triggers begin parts of a schema, as JSON of SGLang
    is_compiled: `text` is the grammar that a front end has compiled, for ranks only
    path: field of the client's request, such as response_format.json_schema.schema, for errors; "": the kind names it
    not_held: what of a lenient schema the compiled grammar leaves out, in words
    """

    kind: str
    text: str
    start: FormStart | None = None  # None: with the first token
    is_compiled: bool = False
    path: str = field(default="", compare=False)
    not_held: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """Its name in errors."""
        return self.path or self.kind

    def validate(self) -> None:
        """Raises RequestError for a value that cannot be a constraint. The compiler checks its text."""
        if self.kind not in KINDS:
            raise RequestError(f"constraint.kind is {self.kind!r}, expected one of {', '.join(KINDS)}", "constraint")
        if not isinstance(self.text, str) or not self.text:
            raise RequestError(f"{self.name} is {self.text!r:.60}, expected a text that is not empty", self.name)
        if self.start is not None:
            self.start.validate()
        if len(self.text) > MAX_CHARS and not self.is_compiled:
            raise RequestError(
                f"{self.name} has {len(self.text)} characters, at most {MAX_CHARS} are taken; send a smaller one",
                self.name,
            )
