# choose_cuda_architectures(WANTED NVCC SMI OUT): which GPUs to compile for, as CMAKE_CUDA_ARCHITECTURES wants it.
#   native        the GPUs of this machine, which the program SMI tells
#   all           all from Ampere (80) on that the compiler NVCC knows: machine code for each, and PTX of the newest for those to come
#   80;90         these
#   (nothing)     native where there is a GPU, else all
# CMake's own names for the first two do not know compilers that are newer than CMake.
function(choose_cuda_architectures wanted nvcc smi out)
  set(found "")
  if(wanted STREQUAL "" OR wanted STREQUAL "native")
    execute_process(COMMAND ${smi} --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE told RESULT_VARIABLE failed ERROR_QUIET)
    if(NOT failed)
      string(REGEX MATCHALL "[0-9]+[.][0-9]+" found "${told}")
      list(TRANSFORM found REPLACE "[.]" "")
      list(REMOVE_DUPLICATES found)
      list(SORT found COMPARE NATURAL)
    endif()
  endif()
  if(wanted STREQUAL "native" AND NOT found)
    message(FATAL_ERROR "LOCKSTEP_CUDA_ARCHITECTURES is native, but ${smi} finds no GPU here: give all, or a list such as 80;90")
  endif()
  foreach(each IN LISTS found)
    if(each LESS 80)
      message(FATAL_ERROR "a GPU of this machine has compute capability ${each}, and Lockstep needs 80 (Ampere) at least, which can copy behind "
        "computing: build without CUDA, or give LOCKSTEP_CUDA_ARCHITECTURES the GPUs of the machine that the build is for")
    endif()
  endforeach()
  if(found)
    set(chosen ${found})
  elseif(wanted STREQUAL "" OR wanted STREQUAL "all")
    execute_process(COMMAND ${nvcc} --list-gpu-arch OUTPUT_VARIABLE told COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCHALL "compute_[0-9]+" chosen "${told}")
    list(TRANSFORM chosen REPLACE "compute_" "")
    list(FILTER chosen EXCLUDE REGEX "^[1-7][0-9]$")  # they cannot copy behind computing (cp.async)
    list(SORT chosen COMPARE NATURAL)
    list(POP_BACK chosen newest)
    list(TRANSFORM chosen APPEND "-real")
    list(APPEND chosen ${newest})
  else()
    set(chosen ${wanted})
  endif()
  set(${out} ${chosen} PARENT_SCOPE)
endfunction()
