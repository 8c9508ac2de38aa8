"""Builds the one extension; everything else is in pyproject.toml.

GRPO_FAST_NATIVE=0 leaves the extension out, =1 makes its failure an error (default: build it where a
compiler works, say so where not). GRPO_FAST_SANITIZE=address|undefined|thread and GRPO_FAST_DEBUG=1 are for
development.
"""

import os
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = os.environ.get("GRPO_FAST_NATIVE", "auto")
SANITIZE = os.environ.get("GRPO_FAST_SANITIZE", "")
DEBUG = os.environ.get("GRPO_FAST_DEBUG", "0") == "1"

# Never a fast-math flag: see CONTRIBUTING.md. -fno-math-errno and -fno-trapping-math only say that nobody reads errno
# or traps; the last is for clang, which warns of every loop that it could have left alone.
FLAGS = [
    "-O3",
    "-std=gnu11",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-pass-failed",
]
MSVC_FLAGS = ["/O2", "/std:c11"]


class BuildNative(build_ext):
    """Compiles with the flags the compiler takes, and survives where there is none."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            if NATIVE == "1":
                raise
            self._notice(error)

    def build_extension(self, ext: Extension) -> None:
        msvc = self.compiler.compiler_type == "msvc"
        ext.extra_compile_args = list(MSVC_FLAGS if msvc else FLAGS)
        if not msvc:
            ext.extra_link_args = ["-lpthread", "-lm"]
            if DEBUG:
                ext.extra_compile_args += ["-O0", "-g", "-Wall", "-Wextra"]
            if SANITIZE:
                ext.extra_compile_args += [f"-fsanitize={SANITIZE}", "-g"]
                ext.extra_link_args += [f"-fsanitize={SANITIZE}"]
        try:
            super().build_extension(ext)
        except Exception as error:
            if NATIVE == "1":
                raise
            self._notice(error)

    @staticmethod
    def _notice(error: Exception) -> None:
        print(
            "\n" + "*" * 78 + "\n"
            f"grpo-fast: the compiled backend was not built ({error}).\n"
            "Everything works, slower, with Numba or NumPy. To build it, install a C compiler\n"
            "(gcc or clang) and reinstall; GRPO_FAST_NATIVE=1 shows the error in full.\n" + "*" * 78,
            file=sys.stderr,
        )


def extensions() -> list[Extension]:
    if NATIVE == "0":
        return []
    headers = [
        "contract.h",
        "dispatch.h",
        "isa.inc.h",
        "formulas.inc.h",
        "blocks.inc.h",
        "tokens.inc.h",
        "fused.inc.h",
        "native.h",
        "pools.h",
        "threads.h",
    ]
    return [
        Extension(
            "grpo_fast._native",
            sources=["src/_native.pyx", "src/native.c", "src/pools.c", "src/threads.c"],
            depends=[f"src/{header}" for header in headers],
            include_dirs=["src"],
            optional=NATIVE != "1",
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative})
