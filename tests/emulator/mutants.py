"""Mutants of the product's kernels: where they break, and the copy of csrc/ that has them all.

Mutants are not built one by one: each place is rewritten so that a variable chooses, while a kernel
runs, what it does. See mutate.py, which runs them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .build import BUILD, ROOT

CODE = BUILD / "mutants" / "csrc"
FOLDERS = ("device", "kernels")

# A call that is a statement of its own, and without which others, or copies, are not waited for.
_CALL = re.compile(
    r"^( *)((?:ptx|emu)::\w*(?:sync|wait|fence|commit)\w*(?:<[^;()]*>)?\([^;]*\);)(.*)$"
)
# The formatter puts spaces around comparisons, and around no angle bracket.
_COMPARISON = re.compile(r" (<|<=|>|>=|==|!=) ")
# What the compiler has to know, or what is no code that runs.
_CONSTANT = re.compile(r"\bconstexpr\b|static_assert|^\s*(?:#|//|template)|enable_if|conditional_t")

HEADER = """// What mutated code is made of: the operators of `a < Place<...>{} < b`.
#pragma once

#include <type_traits>

namespace mutant {

extern int active;
// By the number of a mutant: whether its place has run, and it would differ there.
extern unsigned char seen[];

bool dropped(int number);

enum Seen : unsigned char { kNotRun, kNone, kRun };

enum Kind { kLess, kLessEqual, kGreater, kGreaterEqual, kEqual, kNotEqual };

template <Kind kKind, class A, class B>
constexpr bool compare(A a, B b) {
  if constexpr (kKind == kLess) return a < b;
  if constexpr (kKind == kLessEqual) return a <= b;
  if constexpr (kKind == kGreater) return a > b;
  if constexpr (kKind == kGreaterEqual) return a >= b;
  if constexpr (kKind == kEqual) return a == b;
  if constexpr (kKind == kNotEqual) return a != b;
}

// Mutant kFirst turns the operator (< is <=, == is !=); kFirst + 1, of an order alone, moves the
// limit by 1 the other way.
template <int kFirst, Kind kKind>
struct Place {};

template <int kFirst, Kind kKind, class A>
struct Left {
  A a;
};

template <Kind kKind>
inline constexpr Kind kTurned = kKind == kLess           ? kLessEqual
                                : kKind == kLessEqual    ? kLess
                                : kKind == kGreater      ? kGreaterEqual
                                : kKind == kGreaterEqual ? kGreater
                                : kKind == kEqual        ? kNotEqual
                                                         : kEqual;

template <int kFirst, Kind kKind, class A, class B>
bool decide(A a, B b) {
  constexpr bool kCanMove = std::is_integral_v<A> && std::is_integral_v<B>;
  seen[kFirst] = kRun;
  if (active == kFirst) return compare<kTurned<kKind>>(a, b);
  if constexpr (kKind < kEqual) {
    // There is no next float.
    seen[kFirst + 1] = kCanMove ? kRun : kNone;
    if constexpr (kCanMove) {
      constexpr int kStep = kKind == kLess || kKind == kGreaterEqual ? 1 : -1;
      A moved = a;
      if (active == kFirst + 1 && !__builtin_add_overflow(a, kStep, &moved)) {
        return compare<kKind>(moved, b);
      }
    }
  }
  return compare<kKind>(a, b);
}

#define MUTANT_OPERATOR(op)                                          \\
  template <class A, int kFirst, Kind kKind>                         \\
  Left<kFirst, kKind, A> operator op(A a, Place<kFirst, kKind>) {    \\
    return {a};                                                      \\
  }                                                                  \\
  template <int kFirst, Kind kKind, class A, class B>                \\
  bool operator op(Left<kFirst, kKind, A> left, B b) {               \\
    return decide<kFirst, kKind>(left.a, b);                         \\
  }
MUTANT_OPERATOR(<)
MUTANT_OPERATOR(<=)
MUTANT_OPERATOR(>)
MUTANT_OPERATOR(>=)
MUTANT_OPERATOR(==)
MUTANT_OPERATOR(!=)
#undef MUTANT_OPERATOR

}  // namespace mutant
"""

_SOURCE = """#include "mutant.h"

namespace mutant {

int active = -1;
unsigned char seen[1 << 16];

bool dropped(int number) {
  seen[number] = kRun;
  return active == number;
}

}  // namespace mutant

extern "C" __attribute__((visibility("default"))) unsigned char* seen_mutants() {
  return mutant::seen;
}

extern "C" __attribute__((visibility("default"))) void set_mutant(int number) {
  mutant::active = number;
}
"""

_KINDS = {
    "<": ("kLess", "<=", "limit - 1"),
    "<=": ("kLessEqual", "<", "limit + 1"),
    ">": ("kGreater", ">=", "limit + 1"),
    ">=": ("kGreaterEqual", ">", "limit - 1"),
    "==": ("kEqual", "!=", ""),
    "!=": ("kNotEqual", "==", ""),
}


# Mutants that do the same as the original, by file, change and code: no test can kill them.
_STEPS = "both sides are multiples of the vector's length"
_GUARDED = "one round more, in which no lane is below head_dim"
_EQUAL = "both branches are the same where the sides are equal"
EQUIVALENT = {
    ("dtype.cuh", "limit - 1", "i [<] Packed<kType>::kWords; i += 4"): _STEPS,
    ("dtype.cuh", "< is <=", "rounded [<] -128"): _EQUAL,
    ("dtype.cuh", "> is >=", "rounded [>] 127"): _EQUAL,
    ("block_copy.cuh", "limit - 1", "i [<] runs.run_bytes"): _STEPS,
    ("cache_write.cuh", "< is <=", "v [<] kVecs"): _GUARDED,
    ("cache_write.cuh", "limit - 1", "element [<] p.shape.head_dim"): _STEPS,
    ("decode_simt.cuh", "limit - 1", "per_row [<] ptx::kWarpSize"): "powers of two",
    ("decode_simt.cuh", "< is <=", "per_row * kVector [<] head_dim"): "more lanes a row, some idle",
    ("decode_simt.cuh", "limit - 1", "per_row * kVector [<] head_dim"): _STEPS,
    ("decode_simt.cuh", "< is <=", "group - first_row [<] kRows"): _EQUAL,
    ("decode_simt.cuh", "> is >=", "visible.begin [>] begin"): _EQUAL,
    ("decode_simt.cuh", "< is <=", "visible.end [<] end"): _EQUAL,
    ("decode_simt.cuh", "limit - 1", "r [<] item.num_rows"): _EQUAL,
    ("decode_simt.cuh", "limit - 1", "element(lanes, v) [<] p.shape.head_dim"): _STEPS,
    ("decode_simt.cuh", "< is <=", "v [<] kVecs"): _GUARDED,
    ("decode_simt.cuh", "limit - 1", "mask [<] ptx::kWarpSize"): "powers of two",
    ("decode_simt.cuh", ">= is >", "item.range.begin [>=] item.range.end"): (
        "an empty chunk writes a partial result that is never read"
    ),
    ("gather.cuh", "limit - 1", "element [<] p.shape.head_dim"): _STEPS,
}


@dataclass(frozen=True)
class Mutant:
    """One break: where, and what is different there."""

    number: int
    file: str
    line: int
    what: str
    code: str

    @property
    def equivalent(self) -> str | None:
        """Why it does the same as the original, if that is known."""
        for (file, what, part), reason in EQUIVALENT.items():
            if self.file.endswith("/" + file) and self.what == what and part in self.code:
                return reason
        return None

    def __str__(self) -> str:
        return f"csrc/{self.file}:{self.line}: {self.what}: {self.code}"


def _code_of(line: str) -> tuple[str, str]:
    """The line without its comment, and the comment."""
    code, slashes, comment = line.partition("//")
    return code, slashes + comment


def mutate(text: str, file: str, first: int) -> tuple[str, list[Mutant]]:
    """The text with a choice in every place, and the mutants that the choices are between."""
    mutants: list[Mutant] = []
    lines = []

    def add(line: int, what: str, code: str) -> int:
        number = first + len(mutants)
        mutants.append(Mutant(number, file, line, what, code.strip()))
        return number

    for index, whole in enumerate(text.splitlines(), 1):
        if call := _CALL.match(whole):
            indent, statement, rest = call.groups()
            number = add(index, "dropped", statement)
            lines.append(f"{indent}if (!mutant::dropped({number})) {statement}{rest}")
            continue
        code, comment = _code_of(whole)
        if _CONSTANT.search(code) or ("operator" in code):
            lines.append(whole)
            continue

        def replace(match: re.Match[str], index: int = index, code: str = code) -> str:
            operator = match.group(1)
            kind, turned, moved = _KINDS[operator]
            column = match.start() + 1
            shown = code[:column] + "[" + operator + "]" + code[column + len(operator) :]
            number = add(index, f"{operator} is {turned}", shown)
            if moved:
                add(index, moved, shown)
            place = f"mutant::Place<{number}, mutant::{kind}>{{}}"
            return f" {operator} {place} {operator} "

        lines.append(_COMPARISON.sub(replace, code) + comment)
    return "\n".join(lines) + "\n", mutants


def write_mutants() -> list[Mutant]:
    """Makes the mutated copy of csrc/; files that stay the same keep their time."""
    mutants: list[Mutant] = []
    target = ROOT / CODE
    wanted: dict[Path, str] = {
        target / "mutant.h": HEADER,
        target / "cuda/mutant.cpp": _SOURCE,
    }
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.is_dir() or path.suffix not in (".h", ".cuh", ".cu", ".cpp", ".def"):
            continue
        name = path.relative_to(ROOT / "csrc")
        text = path.read_text()
        # device/ptx.cuh has a twin; there is nothing of it to mutate.
        if name.suffix == ".cuh" and name.parts[0] in FOLDERS and name.name != "ptx.cuh":
            mutated, found = mutate(text, str(name), len(mutants))
            text = mutated.replace("#pragma once\n", '#pragma once\n\n#include "mutant.h"\n', 1)
            mutants += found
        wanted[target / name] = text
    if target.exists():
        for path in target.rglob("*"):
            if path.is_file() and path not in wanted:
                path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return mutants
