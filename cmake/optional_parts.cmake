# What is used when found: MPI in two flavours, SentencePiece, CUDA, NCCL.

# Asks an MPI compiler wrapper for its flags and defines the target lockstep_NAME (headers and library).
# Sets NAME_FOUND and NAME_VERSION. The wrapper is asked, not used, so one build can serve both flavours.
function(find_mpi name version_macros)
  find_program(${name}_WRAPPER NAMES ${ARGN})
  if(NOT ${name}_WRAPPER)
    return()
  endif()
  execute_process(COMMAND ${${name}_WRAPPER} -show OUTPUT_VARIABLE flags ERROR_QUIET)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  set(include_dirs ${flags})
  list(FILTER include_dirs INCLUDE REGEX "^-I")
  list(TRANSFORM include_dirs REPLACE "^-I" "")
  set(library_dirs ${flags})
  list(FILTER library_dirs INCLUDE REGEX "^-L")
  list(TRANSFORM library_dirs REPLACE "^-L" "")

  find_path(${name}_INCLUDE mpi.h HINTS ${include_dirs} NO_DEFAULT_PATH)
  find_library(${name}_LIBRARY NAMES ${name} mpi HINTS ${library_dirs} NO_DEFAULT_PATH)
  if(NOT ${name}_INCLUDE OR NOT ${name}_LIBRARY)
    return()
  endif()
  # A plain `mpicxx` may be the other flavour; its header tells.
  file(STRINGS ${${name}_INCLUDE}/mpi.h lines REGEX "define +(${version_macros}) ")
  if(NOT lines)
    return()
  endif()
  string(REGEX MATCHALL "[0-9]+[0-9.]*" version "${lines}")
  string(JOIN "." version ${version})

  # The C interface only: the C++ bindings of MPI are gone from the standard.
  add_library(lockstep_${name} INTERFACE)
  target_include_directories(lockstep_${name} SYSTEM INTERFACE ${include_dirs})
  target_compile_definitions(lockstep_${name} INTERFACE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  target_link_libraries(lockstep_${name} INTERFACE ${${name}_LIBRARY})
  set(${name}_FOUND TRUE PARENT_SCOPE)
  set(${name}_VERSION ${version} PARENT_SCOPE)
endfunction()

if(LOCKSTEP_MPI)
  find_mpi(openmpi "OMPI_MAJOR_VERSION|OMPI_MINOR_VERSION|OMPI_RELEASE_VERSION" mpicxx.openmpi mpicxx)
  find_mpi(mpich "MPICH_VERSION" mpicxx.mpich mpicxx)
endif()

if(LOCKSTEP_SENTENCEPIECE)
  pkg_check_modules(SENTENCEPIECE IMPORTED_TARGET sentencepiece)
endif()

if(LOCKSTEP_CUDA)
  find_package(CUDAToolkit QUIET)
  find_path(NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR})
endif()
