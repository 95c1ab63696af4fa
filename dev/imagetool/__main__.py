"""usage: dev/images NAME... | all      builds what is missing, prints NAME REF@DIGEST for each name"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

from .build import Builder, Built
from .host import HostError, need, own_registry
from .recipes import RecipeError, Recipes
from .registry import Registry, RegistryError
from .wheels import WheelError


def say(text: str) -> None:
    """A progress line."""
    print(f"\033[2m· {text}\033[0m" if sys.stderr.isatty() else f"· {text}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> None:
    """Builds the images named in `arguments[1:]` of the checkout `arguments[0]`."""
    root, names = Path(arguments[0]), arguments[1:]
    cache = Path(os.environ["DDTREE_CACHE"])
    recipes = Recipes(root, cache, say)
    if not names or names[0].startswith("-"):
        sys.exit(f"{__doc__}\nimages: {', '.join(recipes.all)}")
    local, seen_as = os.environ.get("DDTREE_REGISTRY_LOCAL", ""), os.environ.get("DDTREE_REGISTRY", "10.88.0.1:5000")
    try:
        wanted = recipes.closure(names)
        need("zstd", "zstd", say)
        with nullcontext(local) if local else own_registry(cache / "registry", say) as address:
            registry = Registry(address)
            registry.ping()
            builder = Builder(root, cache, registry, seen_as, say)
            done: dict[str, Built] = {}
            for recipe in wanted:
                done[recipe.name] = builder.build(recipe, done.get(recipe.base or ""))
    except (RegistryError, RecipeError, WheelError, HostError) as error:
        sys.exit(f"images: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    for name in done if "all" in names else dict.fromkeys(names):
        print(name, done[name].ref)


if __name__ == "__main__":
    main(sys.argv[1:])
