// RAFT's normalTable: rows of samples, with a mean and a deviation for each column.
#include <exception>
#include <raft/core/resource/cuda_stream.hpp>
#include <raft/core/resources.hpp>
#include <raft/random/rng.cuh>
#include <string>

using raft::random::GeneratorType;
using raft::random::RngState;

// Writes to `out` of shape (n, d), with a `generator` of the enumeration GeneratorType. Returns an error's text, or
// null.
extern "C" const char* draw(float* out, const float* mu, const float* sigma, unsigned d, unsigned n, unsigned,
                            unsigned generator, void*) {
  static std::string message;
  try {
    // Never destroyed: CUDA may be gone at the end of the process.
    static raft::resources& resources = [] -> raft::resources& {
      auto* made = new raft::resources;
      raft::resource::set_cuda_stream(*made, cuda::stream_ref{cudaStreamLegacy});
      return *made;
    }();
    static RngState states[] = {{7, GeneratorType::GenPhilox}, {7, GeneratorType::GenPC}};
    static_assert(GeneratorType::GenPhilox == 0 && GeneratorType::GenPC == 1, "states are in their order");
    using Vector = raft::device_vector_view<const float, int>;
    raft::random::normalTable<float, int>(resources, states[generator], Vector(mu, d), Vector(sigma, d),
                                          raft::make_device_matrix_view<float, int>(out, n, d));
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
