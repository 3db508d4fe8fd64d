// Wraps the store's engine into one that fails on demand.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "common/faulty_engine.h"
#include "common/hooks.h"

namespace systest {

// Takes effect at the next start of the library: *disk is then its engine, until vmem_shutdown().
inline void wrap_engine(vmem::store::FaultyEngine** disk) {
  using vmem::store::Engine, vmem::store::FaultyEngine;
  vmem::api::test_hooks().wrap_engine = [disk](std::unique_ptr<Engine> inner) -> std::unique_ptr<Engine> {
    std::unique_ptr<FaultyEngine> made;
    const auto s = FaultyEngine::wrap(std::move(inner), 1, &made);
    EXPECT_TRUE(s.ok()) << s.text();
    *disk = made.get();
    return made;
  };
}

}  // namespace systest
