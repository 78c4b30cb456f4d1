// Calls of our operators through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "ops.h"

namespace fusednorm {

/// An operator's handle, of the signature that Operators gives it.
template <class Result, class... Args>
c10::TypedOperatorHandle<Result(Args...)> find(const char* name,
                                               Result (*)(c10::DispatchKeySet, Args...)) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Result(Args...)>();
}

/// With a key set, a redispatch to it.
template <class Handle, class... Args>
auto call(const Handle& handle, const Keys& keys, Args&&... args) {
  return keys ? handle.redispatch(*keys, std::forward<Args>(args)...)
              : handle.call(std::forward<Args>(args)...);
}

}  // namespace fusednorm
