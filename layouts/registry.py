"""From parameters and providers to layouts."""

from collections.abc import Iterable
from importlib.metadata import entry_points

from .errors import LayoutError
from .experts import ExpertGrid
from .join import Join
from .layout import EXPERT, Layout
from .provider import LayoutProvider, Level, ParamInfo
from .stages import Fuse, Stage
from .storage import Whole

ENTRY_POINTS = "shardplan.layouts"


class LayoutRegistry:
    """Providers that make layouts; an instance that is passed around, never changed.

    Args:
        providers: Provider instances; the order does not matter, the levels do.

    Raises:
        LayoutError: If two providers have one name, or something is no provider.
    """

    def __init__(self, providers: Iterable[LayoutProvider]) -> None:
        self._providers: tuple[LayoutProvider, ...] = tuple(providers)
        seen: dict[str, LayoutProvider] = {}
        for provider in self._providers:
            if isinstance(provider, type) or not isinstance(provider, LayoutProvider):
                raise LayoutError(
                    f"{provider!r} is no layout provider. Pass an instance with name, level, "
                    "claims(param) and stages(param)."
                )
            if provider.level not in list(Level):
                raise LayoutError(
                    f"the layout provider {provider.name!r} has the level {provider.level!r}, which "
                    f"is none of {', '.join(level.name for level in Level)}. It would never be asked."
                )
            if provider.name in seen:
                raise LayoutError(
                    f"two layout providers have the name {provider.name!r}: "
                    f"{seen[provider.name]!r} and {provider!r}. Leave one out, or give it "
                    "another name."
                )
            seen[provider.name] = provider
        self._experts = next((p for p in self._providers if isinstance(p, ExpertGrid)), None)
        self._by_level = [
            (level, [(p.claims, p) for p in self._providers if p.level == level]) for level in Level
        ]
        # Parameters of one kind share one chain, so that what is computed for it is found by
        # identity; the chains are values, and sharing them changes no answer.
        self._chains: dict[tuple[Stage, ...], tuple[Stage, ...]] = {}

    @property
    def providers(self) -> tuple[LayoutProvider, ...]:
        """The providers, as given."""
        return self._providers

    def layout(self, param: ParamInfo) -> Layout:
        """Returns the layout of a parameter.

        A parameter that nobody claims at any level is whole and equal on every rank of its grid.

        Raises:
            LayoutError: If two providers claim it at one level, or one can't place it.
        """
        stages: list[Stage] = []
        joined: list[Stage] = []
        name = param.fqn
        for level, members in self._by_level:
            provider: LayoutProvider | None = None
            for claims, candidate in members:
                if not claims(param):
                    continue
                if provider is not None:
                    raise param.fail(
                        f"both {provider.name!r} and {candidate.name!r} claim it at level "
                        f"{level.name}",
                        "Leave one of them out of layouts=, or narrow its patterns.",
                    )
                provider = candidate
            if provider is not None:
                for stage in provider.stages(param):
                    early = level <= Level.PARALLEL and isinstance(stage, Fuse | Join)
                    (joined if early else stages).append(stage)
                rename = getattr(provider, "rename", None)
                if rename is not None:
                    name = rename(param, name)
            if level is Level.STORAGE and not stages:
                stages.append(Whole(param.local_shape))
            elif level is Level.PARALLEL:
                stages += joined  # parts are joined again when each of them is global
        single = ""
        if param.is_expert and EXPERT not in name and self._experts is not None:
            # Asked last: the pipeline's provider renames what stands before the experts' token.
            single = self._experts.single_name(name)
        chain = self._chains.setdefault(tuple(stages), tuple(stages))
        return Layout(param.fqn, name, chain, param.family, single)


def installed_layouts() -> tuple[LayoutProvider, ...]:
    """Returns one instance of each provider that an installed package registers.

    A package registers a provider's class (or a function that makes one) in the entry-point
    group `shardplan.layouts`.

    Raises:
        LayoutError: If one can't be loaded; the entry point's name and package are named.
    """
    found = []
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda e: e.name):
        try:
            made = entry.load()
            found.append(made() if callable(made) else made)
        except Exception as error:
            package = entry.dist.name if entry.dist else "an unknown package"
            raise LayoutError(
                f"the layout provider {entry.name!r} of {package} can't be loaded: {error}. "
                "Uninstall the package, or pass layouts= without it."
            ) from error
    return tuple(found)
