// The loaded units of a device. Only the library with the device's operators includes this file.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

#include "torch/unit.h"

namespace multisample {

// Loads the unit for calls like `call`. Returns 0, or 1 with the reason in a text of `size` bytes.
using UnitLoader = int (*)(const Launch* call, char* reason, u64 size);
inline std::atomic<UnitLoader> unit_loader;

// The function for a call. Loads its unit, and throws if that fails. `remedy` is for processes that load no units.
template <class Function>
Function* unit_function(const Launch& call,
                        const char* remedy =
                            "call multisample.torch.load_operators() in Python, or without Python "
                            "load the library that 'python -m multisample build torch_ext' prints") {
  const std::atomic<UnitFunction>& unit = units[kind_of(call)];
  if (unit == nullptr) {
    char reason[4096]{};
    std::strncpy(reason, remedy, sizeof(reason) - 1);
    const UnitLoader load = unit_loader;
    if (load == nullptr || load(&call, reason, sizeof(reason)) != 0 || unit == nullptr) {
      throw std::runtime_error(std::string("multisample: the kernels of this call are not loaded: ") + reason);
    }
  }
  return reinterpret_cast<Function*>(unit.load());
}

}  // namespace multisample

// Whether the unit for calls of a kind is loaded.
MULTISAMPLE_EXPORT int multisample_has_unit(multisample::u32 kind) { return multisample::units[kind] != nullptr; }

// Adds the units of another library, which must stay loaded.
MULTISAMPLE_EXPORT void multisample_add_units(const void* table) {
  const auto* const others = static_cast<const std::atomic<multisample::UnitFunction>*>(table);
  for (multisample::u32 kind = 0; kind < multisample::kKinds; ++kind) {
    if (others[kind] != nullptr) multisample::units[kind] = others[kind].load();
  }
}

// Sets the function that loads units which are missing.
MULTISAMPLE_EXPORT void multisample_set_unit_loader(multisample::UnitLoader load) { multisample::unit_loader = load; }
