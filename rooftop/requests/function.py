"""Functions of a request, or of its fields as keywords."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from rooftop.core.errors import RooftopError
from rooftop.core.extras import naming_extras

if TYPE_CHECKING:
    import inspect

_Parameters = ParamSpec("_Parameters")
_Request = TypeVar("_Request")
_Watch = TypeVar("_Watch")
_Answer = TypeVar("_Answer")


class RequestFunction(Generic[_Parameters, _Request, _Watch, _Answer]):
    """A function of a frozen request, or of the request's fields: both are typed by the dataclass.

    A second parameter of the function, such as ``on_progress``, is a keyword of both forms.
    """

    def __init__(self, build: Callable[_Parameters, _Request], run: Callable[..., _Answer]) -> None:
        #: The class of the requests.
        self.request: Any = build
        self._run = run
        functools.update_wrapper(self, run, assigned=("__module__", "__name__", "__qualname__", "__annotations__"))
        code = getattr(run, "__wrapped__", run).__code__
        self._watch = code.co_varnames[1] if code.co_argcount > 1 else None

    # Both take time, and few ask for them.
    @property
    def __signature__(self) -> inspect.Signature:
        import inspect

        returned = inspect.signature(self._run).return_annotation
        return inspect.signature(self.request).replace(return_annotation=returned)

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # of the function, not of the class
        import inspect

        text = inspect.getdoc(self._run) or ""
        fields = "\n".join(f"    {field.name}: {field.about}" for field in self.request.settings())
        return f"{text}\n\nArgs:\n{fields}\n"

    @overload
    def __call__(self, request: _Request, /, **watch: _Watch | None) -> _Answer: ...

    @overload
    def __call__(self, /, *args: _Parameters.args, **fields: _Parameters.kwargs) -> _Answer: ...

    def __call__(self, /, *args: Any, **fields: Any) -> Any:
        """Run the request, or the one of these fields. Raises RooftopError for fields next to a request."""
        watch = {name: fields.pop(name) for name in (self._watch,) if name is not None and name in fields}
        is_request = len(args) == 1 and isinstance(args[0], self.request)
        if is_request and fields:
            raise RooftopError("request", f"a request and {', '.join(fields)}", "one of the two")
        request = args[0] if is_request else self.request(*args, **fields)
        with naming_extras():
            return self._run(request, **watch)


class _OfRequest(Generic[_Parameters, _Request]):
    """The decorator of ``of_request``."""

    def __init__(self, build: Callable[_Parameters, _Request]) -> None:
        self._build = build

    @overload
    def __call__(
        self, run: Callable[[_Request, _Watch | None], _Answer], /
    ) -> RequestFunction[_Parameters, _Request, _Watch, _Answer]: ...

    @overload
    def __call__(
        self, run: Callable[[_Request], _Answer], /
    ) -> RequestFunction[_Parameters, _Request, None, _Answer]: ...

    def __call__(self, run: Any, /) -> RequestFunction[_Parameters, _Request, Any, Any]:
        """Let a function of a request also take the request's fields."""
        return RequestFunction(self._build, run)


def of_request(build: Callable[_Parameters, _Request]) -> _OfRequest[_Parameters, _Request]:
    """Let a function of a request also take the request's fields."""
    return _OfRequest(build)
