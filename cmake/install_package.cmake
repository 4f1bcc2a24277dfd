# `cmake --install`: command, public headers, static libraries, and the package for find_package(lockstep).
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)

install(TARGETS lockstep)
install(TARGETS ${LOCKSTEP_LIBRARIES} lockstep_all EXPORT lockstep-targets
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT lockstep-targets NAMESPACE lockstep:: DESTINATION ${package_dir})

configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/lockstep-config.cmake.in
  ${CMAKE_BINARY_DIR}/lockstep-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/lockstep-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/lockstep-config.cmake
  ${CMAKE_BINARY_DIR}/lockstep-config-version.cmake DESTINATION ${package_dir})
